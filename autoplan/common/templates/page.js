
(function(){
var open=function(){var id=decodeURIComponent(location.hash.slice(1)),to=id&&document.getElementById(id);
if(to&&to.tagName==='DETAILS'){to.open=true;to.scrollIntoView({block:'nearest'});to.querySelector('summary').focus()}};
addEventListener('hashchange',open);open();
document.addEventListener('click',function(e){var a=e.target.closest&&e.target.closest('a[href^="#"]');
if(a&&a.getAttribute('href')===location.hash)open()});
var field=document.getElementById('search');if(!field)return;
document.getElementById('searching').hidden=false;
var boxes=[].slice.call(document.querySelectorAll('.box'));
var told=[].slice.call(document.querySelectorAll('details[data-path]'));
field.addEventListener('input',function(){var q=field.value.trim().toLowerCase(),n=0;
boxes.forEach(function(b){var hit=q&&b.textContent.toLowerCase().indexOf(q)>=0;
b.classList.toggle('lit',!!hit);b.classList.toggle('dim',!!q&&!hit);if(hit)n++});
told.forEach(function(d){d.hidden=!!q&&d.textContent.toLowerCase().indexOf(q)<0});
document.getElementById('hits').textContent=q?n+' in the drawing, '+told.filter(function(d){return !d.hidden}).length+
' explained below':''});
})();
